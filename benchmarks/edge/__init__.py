"""Integer edge models, against float models and Qwix."""
