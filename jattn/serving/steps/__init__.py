"""What runs on the device between two reads: pure functions of arrays, and the state they share."""
