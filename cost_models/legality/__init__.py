"""Rules that decide which plans can exist."""
