// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Framed protocol data units (RFC 5044, 4): what frames a segment in the stream. Without markers.
//!
//! The length of the ULPDU, the ULPDU, zeros up to a multiple of four bytes, a CRC32C of all that.
use super::refusal::Refusal;

const LENGTH: usize = 2;
const CRC: usize = 4;
/// The longest ULPDU, bytes.
pub(crate) const MAX_ULPDU: usize = u16::MAX as usize;

/// What is wrong with an FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bad {
    Crc,
}

impl From<Bad> for Refusal {
    fn from(bad: Bad) -> Self {
        match bad {
            Bad::Crc => Self::MpaCrc,
        }
    }
}

/// Bytes of padding behind a length field and a ULPDU.
fn padding(ulpdu: usize) -> usize {
    (LENGTH + ulpdu).wrapping_neg() % 4
}

fn ulpdu_length(bytes: &[u8]) -> Option<usize> {
    let (length, _) = bytes.split_first_chunk::<LENGTH>()?;
    Some(usize::from(u16::from_be_bytes(*length)))
}

/// Bytes of an FPDU with a ULPDU of this length.
pub(crate) fn length(ulpdu: usize) -> usize {
    LENGTH + ulpdu + padding(ulpdu) + CRC
}

/// Bytes of the FPDU that begins here, if enough of it is there to tell.
pub(crate) fn needed(bytes: &[u8]) -> Option<usize> {
    ulpdu_length(bytes).map(length)
}

/// The longest ULPDU whose FPDU is no longer than this, bytes.
pub(crate) fn ulpdu_within(most: usize) -> usize {
    let whole = most / 4 * 4;
    whole.saturating_sub(LENGTH + CRC).min(MAX_ULPDU)
}

/// Reads the FPDU that begins here: its ULPDU, and its length. `None` if it is not there as a whole.
/// With `crc`, its CRC must be right; else that field may have any value.
pub(crate) fn read(bytes: &[u8], crc: bool) -> Result<Option<(&[u8], usize)>, Bad> {
    let Some((length, fpdu)) = needed(bytes).and_then(|n| Some((n, bytes.get(..n)?))) else {
        return Ok(None);
    };
    let Some((covered, sum)) = fpdu.split_last_chunk::<CRC>() else {
        return Ok(None);
    };
    if crc && crc32c::crc32c(covered).to_le_bytes() != *sum {
        return Err(Bad::Crc);
    }
    let ulpdu = ulpdu_length(covered).and_then(|n| covered.get(LENGTH..)?.get(..n));
    Ok(ulpdu.map(|ulpdu| (ulpdu, length)))
}

/// Writes an FPDU with this header, and `len` bytes of payload that `payload` writes, to `space`, which
/// has room for it. With `crc` it has a CRC, else zeros. Returns how long it is; 0, with nothing of use
/// written, if it does not fit, or the ULPDU is longer than [`MAX_ULPDU`].
///
/// # Errors
///
/// That of `payload`.
pub(crate) fn write<E>(
    space: &mut [u8],
    header: &[u8],
    len: usize,
    crc: bool,
    payload: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<usize, E> {
    let ulpdu = header.len() + len;
    let all = length(ulpdu);
    let fits = u16::try_from(ulpdu).ok().zip(space.get_mut(..all));
    let Some((field, fpdu)) = fits else {
        return Ok(0);
    };
    let Some((covered, sum)) = fpdu.split_last_chunk_mut::<CRC>() else {
        return Ok(0);
    };
    let (front, rest) = covered.split_at_mut(LENGTH);
    front.copy_from_slice(&field.to_be_bytes());
    let (head, rest) = rest.split_at_mut(header.len());
    head.copy_from_slice(header);
    let (body, padding) = rest.split_at_mut(len);
    payload(body)?;
    padding.fill(0);
    *sum = if crc {
        crc32c::crc32c(covered).to_le_bytes()
    } else {
        [0; CRC]
    };
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The ULPDU of the examples of RFC 5044, 4.4: a Send of 24 zeros.
    fn example() -> Vec<u8> {
        let mut ulpdu = vec![0x41, 0x43];
        ulpdu.extend([0; 4]);
        ulpdu.extend([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        ulpdu.extend([0; 24]);
        ulpdu
    }

    fn written(ulpdu: &[u8], crc: bool) -> Vec<u8> {
        // What was there before is of no interest.
        let mut bytes = vec![0xa5; length(ulpdu.len())];
        let (header, payload) = ulpdu.split_at(ulpdu.len() / 2);
        let whole = write(&mut bytes, header, payload.len(), crc, |to| {
            to.copy_from_slice(payload);
            Ok::<_, ()>(())
        });
        assert_eq!(whole, Ok(bytes.len()));
        bytes
    }

    #[test]
    fn the_crc_is_that_of_iscsi() {
        let sum = crc32c::crc32c(&[0; 32]).to_le_bytes();
        assert_eq!(sum, [0xaa, 0x36, 0x91, 0x8a]);
        // The example of the RFC has a marker before its length field.
        let mut example = [vec![0, 0, 0, 0, 0, 42], example()].concat();
        let sum = crc32c::crc32c(&example).to_le_bytes();
        assert_eq!(sum, [0x52, 0x23, 0x99, 0x83]);
        example.drain(..4);
        let sum = crc32c::crc32c(&example).to_le_bytes();
        assert_eq!(written(&example[2..], true), [&example[..], &sum].concat());
        assert_eq!(sum, [0xb7, 0x24, 0x3e, 0xc3]);
    }

    #[test]
    fn they_are_padded() {
        for (ulpdu, padded) in [(0, 8), (1, 8), (2, 8), (3, 12), (6, 12), (7, 16)] {
            let bytes = written(&vec![7; ulpdu], false);
            assert_eq!((bytes.len(), length(ulpdu)), (padded, padded));
            let zeros = &bytes[LENGTH + ulpdu..];
            assert!(zeros.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_ulpdu_may_be_too_long() {
        let nothing = |_: &mut [u8]| Ok::<_, ()>(());
        let mut bytes = vec![0; MAX_ULPDU + 100];
        assert_eq!(
            write(&mut bytes, &[0; 2], MAX_ULPDU - 1, true, nothing),
            Ok(0)
        );
        // Or longer than there is room for.
        assert_eq!(write(&mut bytes[..11], &[0; 3], 3, true, nothing), Ok(0));
        assert_eq!(write(&mut bytes[..12], &[0; 3], 3, true, nothing), Ok(12));
        // Or have a payload that cannot be read.
        assert_eq!(write(&mut bytes, &[0; 3], 3, true, |_| Err(7)), Err(7));
        for (most, ulpdu) in [
            (1448, 1442),
            (1449, 1442),
            (65535, 65526),
            (1 << 20, MAX_ULPDU),
        ] {
            assert_eq!(ulpdu_within(most), ulpdu);
            assert!(length(ulpdu) <= most);
        }
        let longest = vec![9; MAX_ULPDU];
        let bytes = written(&longest, true);
        assert_eq!(read(&bytes, true), Ok(Some((&longest[..], bytes.len()))));
    }

    #[test]
    fn a_wrong_crc_is_seen_where_it_counts() {
        let ulpdu = example();
        let bytes = written(&ulpdu, true);
        for at in LENGTH..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x10;
            assert_eq!(read(&wrong, true), Err(Bad::Crc), "byte {at}");
            assert!(matches!(read(&wrong, false), Ok(Some((_, 48)))));
        }
        let zeros = written(&ulpdu, false);
        assert_eq!(read(&zeros, true), Err(Bad::Crc));
        assert_eq!(read(&zeros, false), Ok(Some((&ulpdu[..], 48))));
        assert_eq!(Refusal::from(Bad::Crc), Refusal::MpaCrc);
    }

    proptest! {
        #[test]
        fn they_are_read_as_they_were_written(
            ulpdu in proptest::collection::vec(any::<u8>(), 0..300),
            after in proptest::collection::vec(any::<u8>(), 0..10),
            crc: bool,
        ) {
            let mut fpdu = written(&ulpdu, crc);
            let whole = fpdu.len();
            fpdu.extend(&after);
            let fpdu = &fpdu[..];
            prop_assert_eq!(whole % 4, 0);
            prop_assert_eq!(needed(fpdu), Some(whole));
            prop_assert_eq!(read(fpdu, crc), Ok(Some((&ulpdu[..], whole))));
            for cut in 0..whole {
                prop_assert_eq!(read(&fpdu[..cut], crc), Ok(None));
                prop_assert_eq!(needed(&fpdu[..cut]), (cut >= LENGTH).then_some(whole));
            }
        }

        #[test]
        fn anything_may_come(bytes: Vec<u8>, crc: bool) {
            if let Ok(Some((ulpdu, consumed))) = read(&bytes, crc) {
                prop_assert!(LENGTH + ulpdu.len() + CRC <= consumed && consumed <= bytes.len());
            }
        }
    }
}
