"""What a case would take on hardware that is not there: simulation of memory and time, and what fits."""
