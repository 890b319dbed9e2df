"""The floor of all rooms: errors, progress, extras, plug-ins, YAML with places. It knows no models and artifacts."""
