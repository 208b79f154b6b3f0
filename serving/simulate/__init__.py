"""What a fleet would do: throughput, slot hits and stalls, from shapes, costs and a trace."""
