"""What stands beside the core: a folder each, which the core never imports.

A config names a project's model or task, and the core finds it in the tables that
the `__init__` of each project has (`settings.import_paths.registered`), which import
nothing. A project imports the core and no other project; deleting its folder leaves
the rest working.
"""
