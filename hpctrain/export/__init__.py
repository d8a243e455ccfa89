"""Turns a plan into files for clusters without Slurm: Kubernetes and bare hosts. One way, pure."""
