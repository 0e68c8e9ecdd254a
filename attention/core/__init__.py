"""What several mechanisms are built from; it knows none of them.

`layout` cuts, multiplies and puts back blocks of arrays, and `platform` is the only
module that knows one kind of device from another.
"""
