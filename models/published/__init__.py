"""Published models, one family per file.

`load` reads a folder into a `Pretrained` and writes it back. `files` defines the format
of the folder, `family` the interface of a family, and `catalog` lists the families.
"""
