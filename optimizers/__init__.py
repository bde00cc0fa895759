"""How weights move: inner optimisers, outer steps and the presets that name whole methods. Pure, no I/O."""
