"""What is wrong with a run: rules by subject, one function each; diagnosis.py asks all of them."""
