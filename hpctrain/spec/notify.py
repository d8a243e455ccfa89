"""The section `notify` of run specs and profiles: whom a run tells about which events, and how.

Belongs here: its fields, and what excludes what among them. Does not belong here: what an event is
(`hpctrain.notify.notices`), sending (`hpctrain.notify.delivery`), reading secrets.

An address of a webhook is a password: who has it can write into the channel. So a document names
the file or the variable that has it and never the address, and no message repeats what was given.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from hpctrain.base.units import Duration
from hpctrain.spec.document import Document
from hpctrain.spec.job_text import SubmitText

# Kinds of `hpctrain.notify.notices.NoticeKind`, each with a sentence in docs/notifications.md.
NoticeName = Literal[
    "started",
    "done",
    "failed",
    "stopped",
    "held",
    "requeued",
    "restarted",
    "node_excluded",
    "rolled_back",
    "checkpoint_rejected",
    "slow_rank",
    "stalled",
    "waiting",
    "disk_low",
]
# After these nothing happens by itself, or a person ought to look.
NEED_A_PERSON: tuple[NoticeName, ...] = (
    *("done", "failed", "held", "rolled_back", "checkpoint_rejected"),
    *("stalled", "waiting", "disk_low"),
)
ChannelKind = Literal["slack", "webhook", "mail", "slurm"]
# An address or the name of an account. Nothing that sendmail or Slurm could read as an option.
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?")
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_RATE = re.compile(r"([1-9]\d{0,3})/(min|h|d)")
_RATE_SECONDS = {"min": 60.0, "h": 3600.0, "d": 86400.0}
# The fields of a channel that only some kinds have.
_FIELDS: dict[str, frozenset[str]] = {
    "slack": frozenset({"url_file"}),
    "webhook": frozenset({"url_file", "token_file"}),
    "mail": frozenset({"to", "sendmail"}),
    "slurm": frozenset({"to"}),
}


def _no_secret_as_a_path(text: str) -> str:
    if "://" in text or "\n" in text or not text:
        raise ValueError("expected the path of a file that has the secret, not the secret")
    return text


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ValueError(f"expected an address such as `ada@example.org`, got `{text}`")
    return text


SecretFile = Annotated[SubmitText, AfterValidator(_no_secret_as_a_path)]
Address = Annotated[str, AfterValidator(_address)]


class ChannelSpec(Document):
    """One way to tell people. Secrets by file only."""

    kind: ChannelKind = Field(
        description="slack: an incoming webhook; webhook: a JSON document by POST; mail: sendmail; "
        "slurm: the mail of Slurm itself, which knows the job and not the run"
    )
    url_file: SecretFile | None = Field(
        None,
        description="slack, webhook: file with the address and nothing else, which only you may "
        "read, such as `~/.config/hpctrain/slack`; `$NAME` is put in where you submit",
    )
    token_file: SecretFile | None = Field(
        None,
        description="webhook: file with a token, sent as `Authorization: Bearer`; `$NAME` is put "
        "in where you submit",
    )
    to: tuple[Address, ...] = Field(
        (),
        description="mail: addresses; slurm: one address at most, by default that of your account",
    )
    sendmail: str = Field(
        "/usr/sbin/sendmail",
        pattern=r"^/",
        description="mail: program that takes a message as `sendmail -t -i` does",
    )

    @model_validator(mode="after")
    def _fields_of_the_kind(self) -> Self:
        foreign = sorted(self.model_fields_set - _FIELDS[self.kind] - {"kind"})
        if foreign:
            raise ValueError(f"a channel of kind {self.kind} has no `{foreign[0]}`")
        if "url_file" in _FIELDS[self.kind] and self.url_file is None:
            raise ValueError(f"a channel of kind {self.kind} needs `url_file`")
        if self.kind == "mail" and not self.to:
            raise ValueError("mail needs addresses: `to: [ada@example.org]`")
        if self.kind == "slurm" and len(self.to) > 1:
            raise ValueError("Slurm takes one address: give one, or a channel of kind mail")
        return self


class NotifySpec(Document):
    """Whom the run tells about which of its events. Each event is told once per channel."""

    channels: tuple[ChannelSpec, ...] = Field(
        (), max_length=8, description="Where messages go; an empty list switches a site's off"
    )
    on: tuple[NoticeName, ...] = Field(
        NEED_A_PERSON,
        description="Events that are told; default: those after which a person has to do something",
    )
    quiet_hours: str | None = Field(
        None,
        description="Time of the day without messages, such as `22:00-07:00`; what happens then is "
        "told in one message afterwards",
    )
    time_zone: str | None = Field(
        None, description="Time zone of `quiet_hours`, such as `Europe/Berlin`"
    )
    even_at_night: tuple[NoticeName, ...] = Field(
        (), description="Events that are told in quiet hours as well, such as `[failed]`"
    )
    at_most: str = Field(
        "6/h",
        description="Messages per channel, as `6/h`, `1/min` or `20/d`; what is more comes in one "
        "message afterwards. That a run is done, held or has failed is told in any case",
    )
    queue_limit: Duration | None = Field(
        None,
        gt=0,
        description="waiting: `hpctrain watch` tells that a job has waited longer, such as `1d`; "
        "absent: it does not",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quiet_hours is not None:
            found = _HOURS.fullmatch(self.quiet_hours)
            if not found or found[1] + found[2] == found[3] + found[4]:
                raise ValueError("quiet_hours: expected a time of the day such as `22:00-07:00`")
            if self.time_zone is None:
                raise ValueError("quiet_hours needs `time_zone`, such as `Europe/Berlin`")
        elif self.time_zone is not None or self.even_at_night:
            raise ValueError("`time_zone` and `even_at_night` go with `quiet_hours`")
        if self.time_zone is not None:
            from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

            try:
                ZoneInfo(self.time_zone)
            except (ZoneInfoNotFoundError, ValueError, OSError):
                raise ValueError(
                    f"`{self.time_zone}` is no time zone of this machine: expected a name such as "
                    "`Europe/Berlin` or `UTC`"
                ) from None
        if sum(channel.kind == "slurm" for channel in self.channels) > 1:
            raise ValueError(
                "a job has one address for the mail of Slurm: one channel of kind slurm"
            )
        if not _RATE.fullmatch(self.at_most):
            raise ValueError("at_most: expected a number per time such as `6/h`, `1/min`, `20/d`")
        unheard = [name for name in self.even_at_night if name not in self.on]
        if unheard:
            raise ValueError(f"even_at_night: `{unheard[0]}` is not among `on`")
        return self

    @property
    def quiet_minutes(self) -> tuple[int, int] | None:
        """Begin and end of the quiet hours, in minutes after midnight."""
        found = _HOURS.fullmatch(self.quiet_hours or "")
        if found is None:
            return None
        return int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])

    @property
    def rate(self) -> tuple[int, float]:
        """The number of messages, and the seconds in which no more are sent."""
        found = _RATE.fullmatch(self.at_most)
        assert found is not None, "validated"
        return int(found[1]), _RATE_SECONDS[found[2]]


def joined_notify(own: NotifySpec | None, site: NotifySpec | None) -> NotifySpec | None:
    """Join the section of a spec with its site's: a field that the spec sets replaces the site's.

    None where nobody is to be told.
    """
    if own is None or site is None:
        chosen = own or site
    else:
        given = own.model_fields_set
        # The hours of the spec go with its own zone, not with the site's choice of night events.
        if "quiet_hours" in given:
            given = given | {"time_zone", "even_at_night"}
        values = {name: getattr(own, name) for name in given}
        if "on" in given and "even_at_night" not in given:
            kept = tuple(name for name in site.even_at_night if name in own.on)
            values["even_at_night"] = kept
        chosen = site.model_copy(update=values)
    return chosen if chosen is not None and chosen.channels else None
