"""The plugin in a launch script: flags, installation, and the doctor."""
