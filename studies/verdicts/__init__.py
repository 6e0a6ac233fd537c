"""How well the gate finds slowdowns, studied through the commands that people type.

    python -m studies.verdicts runs --minutes 30    # judge equal and slower versions, beside a neighbour or none
    python -m studies.verdicts planted              # ten changes, and what the gate prints of each
    python -m studies.verdicts report               # docs/verdicts.md

`runs` adds a line to docs/verdicts/runs.jsonl for each run of pytest: fresh processes, in a repository made for it.
`planted` writes docs/verdicts/planted.txt.
"""
