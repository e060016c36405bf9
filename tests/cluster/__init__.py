"""A real Slurm cluster on one machine: munged, slurmctld, and slurmd on nodes with their own namespaces."""

from tests.cluster.bed import Bed, BedUnavailable, CommandFailed

__all__ = ["Bed", "BedUnavailable", "CommandFailed"]
