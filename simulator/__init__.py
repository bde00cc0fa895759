"""Swarms on one machine: simulated peers on virtual time with checkers, and real processes on loopback."""
