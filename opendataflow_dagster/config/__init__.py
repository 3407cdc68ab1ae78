"""Settings, credentials and the passkey."""
