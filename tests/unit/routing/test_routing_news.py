"""No node floods: what many wait for goes to a few at a time, whoever is popular."""

from __future__ import annotations

from collections import Counter

from protocol.messages import Message
from protocol.messages.routing import FlowLabels, FlowOffers
from protocol.routing.news import News
from protocol.simulation.routing.families import Family
from protocol.simulation.routing.measure import whole_routes
from protocol.simulation.routing.network import peer_at
from protocol.simulation.routing.trial import Script, run_trial
from protocol.simulation.routing.world import INDEX, RoutingWorld, WorldOptions

PEERS = [peer_at(i) for i in range(5)]
AUDIENCE = WorldOptions().settings.audience


def test_who_has_waited_longest_is_told_first_and_then_only_the_newest() -> None:
    news = News[str]()
    news.add(PEERS, {"a"})
    assert news.take(PEERS, 2) == [(peer, False, {"a"}) for peer in PEERS[:2]]
    news.add(PEERS, {"b"})
    assert news.take(PEERS, 4) == [
        *((peer, False, {"a", "b"}) for peer in PEERS[2:]),
        (PEERS[0], False, {"b"}),
    ]
    assert news.take(PEERS, 4) == [(PEERS[1], False, {"b"})]
    assert not news


def test_who_left_and_who_knows_all_is_not_told() -> None:
    news = News[str]()
    news.add(PEERS, {"a"}, is_all=True)
    news.told(PEERS[0])
    assert news.take(PEERS[:2], 4) == [(PEERS[1], True, {"a"})]
    news.add(PEERS, ())
    assert [is_all for _, is_all, _ in news.take(PEERS, 9)] == [False] * 5


class Counted(RoutingWorld):
    """Counts what one node sends of one kind at once, and what all send."""

    def __init__(self, family: Family) -> None:
        self.at_once: Counter[tuple[float, int, str]] = Counter()
        super().__init__(family.network(0), 0, WorldOptions())

    def _carry(self, sender: int, receiver: int, message: Message) -> None:
        if isinstance(message, FlowOffers | FlowLabels):
            kind = f"{message.kind} {message.is_out if isinstance(message, FlowLabels) else ''}"
            self.at_once[self.now, sender, kind] += 1
        super()._carry(sender, receiver, message)


def test_a_node_that_many_have_in_view_tells_few_at_once() -> None:
    world = Counted(Family(101, num_stages=2))
    world.run_until(4.0)
    assert len(world.residents[0].node._ctx.view.subscribers) == 50
    # what changed, then those who wait; and an answer
    assert max(world.at_once.values()) <= 2 * AUDIENCE + 1


def test_messages_per_node_do_not_grow_with_the_swarm() -> None:
    sent = {}
    for size in (25, 121):  # 12 and 60 holders of each stage
        world = Counted(Family(size, num_stages=2))
        world.run_until(3 * world.tick_s)
        sent[size] = world.num_sent / size
    assert sent[121] < 1.5 * sent[25]


def test_a_data_node_looks_beyond_its_view_for_what_it_wants() -> None:
    world = Counted(Family(61, num_stages=1, capacity=(1, 1)))
    world.run_until(30 * world.tick_s)
    assert len(whole_routes(world)) == 60


def test_a_data_node_that_wants_much_sees_more_than_a_holder() -> None:
    world = RoutingWorld(Family(201, num_stages=2).network(0), 0, WorldOptions())
    seen = [len(world.residents[i].node._ctx.view.next) for i in (0, 1)]
    assert seen == [68, 30]


def test_who_drops_out_of_view_sends_no_more_news() -> None:
    world = RoutingWorld(Family(101, num_stages=2).network(0), 0, WorldOptions(loss=0.0))
    node = world.residents[1].node
    before = set(node._ctx.view.next)
    node._look_ahead()
    sends = node._ctx.flush()
    dropped = before - set(node._ctx.view.next)
    farewells = {s.peer: s.message for s in sends if not s.message.wants_news}
    assert dropped
    assert set(farewells) == dropped
    for peer, message in farewells.items():
        other = world.residents[INDEX[peer]].node
        other._ctx.view.subscribers[peer_at(1)] = 0
        other.handle(peer_at(1), message, 0.0)
        assert peer_at(1) not in other._ctx.view.subscribers


def test_a_run_ends_a_while_after_the_flow_is_whole_again() -> None:
    script = Script(ticks=90, burst=0.2, burst_tick=30, after_ticks=5)
    trial = run_trial(Family(17, num_stages=4, capacity=(2, 4)).network(1), "gwtf", script, 1)
    change = trial.changes[0]
    assert change.recovered is not None
    assert trial.last.tick == 30 + 2 + change.recovered + 5
