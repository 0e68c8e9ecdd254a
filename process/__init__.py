"""How a program starts, fails and stops: flags, errors, signals, host settings.

Imports nothing of this project.
"""
