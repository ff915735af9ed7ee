"""What runs of planned jobs were and did: records of a site, one line each in a file."""
