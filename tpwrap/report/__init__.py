"""What a run tells afterwards."""
