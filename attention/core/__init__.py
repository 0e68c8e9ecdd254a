"""What every mechanism is built from; it knows none of them.

`tile` is softmax attention between some queries and some keys, `loop` runs it
over a sequence, `visibility` says which pairs count, and `platform` is the only
module that knows one kind of device from another.
"""
