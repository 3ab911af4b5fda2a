"""The operators that runtimes of full-integer programs have."""
