"""LiteRT files of full-integer programs.

A program with annotated integers is lowered to StableHLO and converted; the file is
read back, verified and run once. LiteRT's converter and interpreter may crash, so they
run in a separate process, as this folder's ``__main__``. Read `converter` first.
"""
