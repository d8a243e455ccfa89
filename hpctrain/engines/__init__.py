"""From a plan to the document that configures one engine. Pure."""
