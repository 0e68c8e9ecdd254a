"""What stands beside the core: a folder each, which the core never imports.

A config names a project's model or task, and the core finds it by that name. A
project imports the core and no other project; deleting its folder leaves the rest
working.
"""
