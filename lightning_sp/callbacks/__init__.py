"""What is measured while training: throughput, memory."""
