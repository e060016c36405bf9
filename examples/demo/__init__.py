"""The main job, shown: a training run loses a node and ends with the numbers of one that lost nothing.

    python -m examples.demo        (make demo does the set-up first)

As root it boots a small Slurm cluster of namespaces, submits the job and kills a node of it; else it does the same
with emulated nodes. Exits with 1 if anything differs.
"""
