"""Training of a transformer on a pod, compiled without devices."""
