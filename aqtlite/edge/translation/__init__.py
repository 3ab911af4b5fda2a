"""What equations of JAX are in operators of a full-integer program."""
