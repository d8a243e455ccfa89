"""Count what a model is: parameters, floating-point operations, vision stems and heads. Pure."""
