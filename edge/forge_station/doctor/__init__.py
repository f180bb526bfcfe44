"""`forge-station doctor`: what stops a station, or soon will, said before a part waits for it."""
