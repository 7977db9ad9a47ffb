"""What the host holds and sends: compiled steps, weights, the pool, and launches under way."""
