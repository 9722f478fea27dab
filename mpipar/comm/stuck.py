"""Who waits for whom, from what the ranks say of themselves. Needs no MPI.

The state of a rank is a dict: `waits`, a list of {"words", "group", "key", "number", "peer", "members", "arrived",
"main", "token", "looks", "seconds"}, empty for a rank that computes; `calls`, how many collective calls it has made in
each group, by the group's key (a string); `last`, lines of its history; `unreceived`, its sends that nobody has
received, in words; `stacks`, a text; `over`: it has come to its end. It travels as JSON.
"""


def needs(wait, rank, states):
    """The ranks that have to do something before a wait of `rank` can end; those of which nothing is known too."""
    if wait["arrived"]:
        return []
    if wait["peer"] is not None:
        return [wait["peer"]]
    key, number = str(wait["key"]), wait["number"]
    return [member for member in wait["members"] if member != rank
            and (member not in states or states[member]["calls"].get(key, number) < number)]


def deadlocked(states):
    """{rank: tokens of its waits} of the ranks that wait for one another and will for ever: the largest set in which
    every wait of each needs another one of the set.

    It is proved only for states that were the same at two times, one of them after all of the other (`same`). A rank
    whose main thread computes is in no such set, and neither is one that has left (the guard looks after those).
    """
    found = {rank for rank, state in states.items() if any(wait["main"] for wait in state["waits"])}
    while True:
        stay = {rank for rank in found
                if all(found & set(needs(wait, rank, states)) for wait in states[rank]["waits"])}
        if stay == found:
            return {rank: [wait["token"] for wait in states[rank]["waits"]] for rank in sorted(found)}
        found = stay


def same(earlier, later):
    """Whether the deadlocked ranks of two rounds of states are in the same waits, and have looked in between whether
    anything had arrived."""
    one, other = deadlocked(earlier), deadlocked(later)
    if not other or one != other:
        return False
    return all(before["looks"] < after["looks"] for rank in other
               for before, after in zip(earlier[rank]["waits"], later[rank]["waits"]))


def report(title, states, ranks):
    """All that is known, as a text: who waits for whom, then the last operations and the stacks of every rank."""
    lines = [title]
    for rank in ranks:
        lines += [f"  rank {rank} {text}" for text in _doings(rank, states)]
        lines += [f"  rank {rank} has sent {words}" for words in states.get(rank, {}).get("unreceived", ())]
    for rank in ranks:
        if rank in states:
            lines += [f"rank {rank}, last operations:", *(f"  {line}" for line in states[rank]["last"] or ["none"])]
            lines += [f"rank {rank}, {line}" if line.startswith("stack of") else line
                      for line in states[rank]["stacks"].split("\n") if line]
    return "\n".join(lines)


def _doings(rank, states):
    if rank not in states:
        return ["did not answer: it is stopped, or in compiled code that does not let Python run"]
    state, texts = states[rank], []
    for wait in state["waits"]:
        whom = needs(wait, rank, states)
        text = f"waits {wait['seconds']:.1f} s in {wait['words']}"
        if len(wait["members"]) > 1:
            text += f", group {wait['group']}"
        if wait["number"]:
            text += f", call {wait['number']}"
        texts.append(text + (f", for rank {', '.join(map(str, whom))}" if whom else ""))
    return texts or ["has come to its end" if state["over"] else "waits for no operation"]
