"""What we ask of Slurm and tell it. Parses only what 22.05, 24.11 and 26.05 print alike."""
