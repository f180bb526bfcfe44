"""Scanner drivers and the structured-light decoder: triggers in, scans and clouds out."""
