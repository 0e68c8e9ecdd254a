"""Projects: applications of the core, one folder each, which the core never imports.

A config names a project's model or task. The core looks it up in the tables of each
project's `__init__` (`settings.import_paths.registered`), which import nothing. A
project imports the core and no other project, so its folder can be deleted.
"""
