"""What `run.py` measures, how, and what it makes of it: a module for each group of rows, and one for each step."""
