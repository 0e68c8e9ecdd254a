"""Published models, one family per file.

`load` reads a folder into a `Pretrained` and writes it back, `files` is the
format of the folder, `family` what a family consists of, `catalog` all of them.
"""
