"""The script that made the folders needs packages that CI does not have."""

collect_ignore = ["written_by_transformers/make.py"]
