"""LiteRT files of full-integer programs.

A program whose integers are annotated is lowered to StableHLO and converted; the file
is read back, checked and run once. LiteRT's converter and interpreter may end the
process that they run in, so that this folder is a program, too, which they run in. Read
`converter` first.
"""
