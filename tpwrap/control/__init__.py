"""The control plane: messages, wire format, coordinator, store."""
