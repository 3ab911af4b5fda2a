"""The scripts here need packages that CI does not have."""

collect_ignore = ["make.py", "make_peft.py", "read_back.py"]
