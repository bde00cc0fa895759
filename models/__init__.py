"""What is trained by default: small byte-level GPTs."""
