"""What an operator sees of a run: snapshot, live view, doctor, recorder and report. Reads the bus, decides nothing."""
