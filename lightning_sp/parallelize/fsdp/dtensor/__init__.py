"""Parameters as DTensors, used outside of their module's forward: read with their gradient, written, drawn."""
