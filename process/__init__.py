"""How a program starts, fails and stops: flags, errors, signals, host settings.

Imports nothing of this project. Importing it switches off a fusion of XLA that
returns garbage (`process.compiler`), so that every program of the laboratory, a
notebook and a test have right numbers.
"""

from process import compiler

compiler.avoid_faulty_fusion()
