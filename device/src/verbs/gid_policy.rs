// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which GIDs a VM may set, with which source MAC address and VLAN (specification: "SET_GID").
//!
//! The operator decides; this is the judgement alone. It knows no other VM: the caller says whether
//! a GID is reserved for some device of the network.
use std::net::{IpAddr, Ipv6Addr};

use serde::Deserialize;

use super::cq::L2Source;

/// A GID.
pub type Gid = [u8; 16];

/// The highest VLAN id.
pub const MAX_VLAN: u16 = 4094;
/// What stands for no VLAN.
pub const NO_VLAN: u16 = 0xffff;

/// Among which GIDs a VM may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gids {
    /// All that are not reserved for another device, with any source.
    #[default]
    Any,
    /// The link-local one of the device's MAC address and the listed addresses, with that MAC
    /// address as the source, in no VLAN or a listed one.
    Mac,
}

/// What the operator says of the GIDs of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GidPolicy {
    /// Among which GIDs its VM may choose.
    pub gids: Gids,
    /// Addresses that are the device's beside the link-local one of its MAC address.
    pub addresses: Vec<Gid>,
    /// VLAN ids that its VM may use under [`Gids::Mac`].
    pub vlans: Vec<u16>,
}

/// A GID that a VM may not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("GID {}: {reason}", Ipv6Addr::from(*.gid))]
pub struct Refusal {
    /// The GID.
    pub gid: Gid,
    /// Why not.
    pub reason: Reason,
}

/// Why a VM may not set a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// It is another device's.
    #[error("reserved for another device")]
    Reserved,
    /// It is not the device's, and the VM may have no other.
    #[error("neither that of the device's MAC address nor a listed address")]
    NotListed,
    /// The source MAC address is not the device's.
    #[error("the source MAC address {} is not the device's", mac_text(.0))]
    Mac([u8; 6]),
    /// The VLAN is not listed.
    #[error("VLAN {0} is not listed")]
    Vlan(u16),
}

impl GidPolicy {
    /// The GIDs that are the own ones of a device with this MAC address (zero: it has none).
    pub fn own(&self, mac: [u8; 6]) -> impl Iterator<Item = Gid> + '_ {
        let link_local = (mac != [0; 6]).then(|| link_local(mac));
        link_local.into_iter().chain(self.addresses.iter().copied())
    }

    /// Whether the VM of a device with the MAC address `mac` may set `gid` with this source.
    /// `reserved`: the GID is an own one of a device of the network, whichever that is.
    ///
    /// # Errors
    /// If it may not, with the reason.
    pub fn judge(
        &self,
        mac: [u8; 6],
        gid: Gid,
        source: L2Source,
        reserved: bool,
    ) -> Result<(), Refusal> {
        let strict = self.gids == Gids::Mac;
        let own = self.own(mac).any(|own| own == gid);
        let reason = if !own && reserved {
            Reason::Reserved
        } else if !own && strict {
            Reason::NotListed
        } else if strict && source.mac != mac {
            Reason::Mac(source.mac)
        } else if strict && source.vlan != NO_VLAN && !self.vlans.contains(&source.vlan) {
            Reason::Vlan(source.vlan)
        } else {
            return Ok(());
        };
        Err(Refusal { gid, reason })
    }
}

/// The EUI-64 of a MAC address, as interface identifiers and GUIDs have it.
#[must_use]
pub fn eui64([a, b, c, d, e, f]: [u8; 6]) -> [u8; 8] {
    [a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

/// The link-local GID of a MAC address.
#[must_use]
pub fn link_local(mac: [u8; 6]) -> Gid {
    let prefix = 0xfe80u128 << 112;
    (prefix | u128::from(u64::from_be_bytes(eui64(mac)))).to_be_bytes()
}

/// The GID of an IP address.
#[must_use]
pub fn of_address(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// How people write a MAC address.
#[must_use]
pub fn mac_text([a, b, c, d, e, f]: &[u8; 6]) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 1];
    const OTHER: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 2];

    fn gid(address: &str) -> Gid {
        of_address(address.parse().unwrap())
    }

    fn policy(gids: Gids) -> GidPolicy {
        GidPolicy {
            gids,
            addresses: vec![gid("10.0.0.1"), gid("fd00::1")],
            vlans: vec![5],
        }
    }

    fn judge(gids: Gids, gid: Gid, source: ([u8; 6], u16), reserved: bool) -> Option<Reason> {
        let (mac, vlan) = source;
        let judged = policy(gids).judge(MAC, gid, L2Source { mac, vlan }, reserved);
        judged.err().map(|refusal| {
            assert_eq!(refusal.gid, gid);
            refusal.reason
        })
    }

    #[test]
    fn gids_come_from_addresses() {
        let bytes = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
        assert_eq!(link_local(MAC), bytes("fe80::5054:ff:fe12:3401"));
        assert_eq!(gid("10.0.0.1"), bytes("::ffff:10.0.0.1"));
        assert_eq!(gid("fd00::1"), bytes("fd00::1"));
        let own: Vec<_> = policy(Gids::Mac).own(MAC).collect();
        assert_eq!(own, [link_local(MAC), gid("10.0.0.1"), gid("fd00::1")]);
        // There is no link-local one without a MAC address.
        assert_eq!(policy(Gids::Any).own([0; 6]).count(), 2);
    }

    #[test]
    fn own_gids_are_fine_although_they_are_reserved() {
        for gids in [Gids::Any, Gids::Mac] {
            for own in policy(gids).own(MAC) {
                assert_eq!(judge(gids, own, (MAC, NO_VLAN), true), None);
                assert_eq!(judge(gids, own, (MAC, 5), true), None);
            }
        }
    }

    #[test]
    fn gids_of_other_devices_are_nobody_elses() {
        for gids in [Gids::Any, Gids::Mac] {
            let refused = judge(gids, link_local(OTHER), (MAC, NO_VLAN), true);
            assert_eq!(refused, Some(Reason::Reserved));
        }
    }

    #[test]
    fn only_a_strict_policy_looks_at_what_is_nobodys_and_at_the_source() {
        let own = link_local(MAC);
        for (gid, source, reason) in [
            (link_local(OTHER), (MAC, NO_VLAN), Reason::NotListed),
            (gid("10.0.0.2"), (MAC, NO_VLAN), Reason::NotListed),
            (gid("fd00::2"), (MAC, NO_VLAN), Reason::NotListed),
            // The same interface in another network, and the GID of no address at all.
            (
                gid("fd00::5054:ff:fe12:3401"),
                (MAC, NO_VLAN),
                Reason::NotListed,
            ),
            ([0xff; 16], (MAC, NO_VLAN), Reason::NotListed),
            (own, (OTHER, NO_VLAN), Reason::Mac(OTHER)),
            (own, ([0; 6], NO_VLAN), Reason::Mac([0; 6])),
            (own, (MAC, 6), Reason::Vlan(6)),
            (own, (MAC, 0), Reason::Vlan(0)),
        ] {
            assert_eq!(judge(Gids::Mac, gid, source, false), Some(reason));
            assert_eq!(judge(Gids::Any, gid, source, false), None);
        }
    }

    #[test]
    fn a_refusal_names_the_gid_and_the_reason() {
        let text = |gid, reason| Refusal { gid, reason }.to_string();
        assert_eq!(
            text(gid("10.0.0.2"), Reason::Reserved),
            "GID ::ffff:10.0.0.2: reserved for another device"
        );
        assert_eq!(
            text(link_local(MAC), Reason::Mac(OTHER)),
            "GID fe80::5054:ff:fe12:3401: \
             the source MAC address 52:54:00:12:34:02 is not the device's"
        );
    }
}
