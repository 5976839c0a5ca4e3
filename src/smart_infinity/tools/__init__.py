"""What works on a set of devices without its model: inspect, verify, move in and out."""
