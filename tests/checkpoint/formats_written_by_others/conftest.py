"""The scripts here need packages that CI does not have."""

collect_ignore = ["make.py", "read_back.py"]
