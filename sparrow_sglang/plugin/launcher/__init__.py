"""The process that receives requests: routes, checks, reports, control, the audit."""
