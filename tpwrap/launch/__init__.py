"""Starting and keeping processes: supervisors, workers, and a whole job on one machine."""
