//! An ordered map from queue offsets, most of which are neighbours.
//!
//! Values of 16 neighbouring offsets are in one bucket: a bit for each offset that has a value, and
//! the values in order. So a value among neighbours takes about six bytes beside itself, and removing
//! one moves at most 15 others. A B-tree whose keys are added in ascending order, as queue offsets
//! are, has nodes that are half full, and would take more than twice the bytes of the values.

use std::collections::BTreeMap;

const BUCKET_BITS: u32 = 4;
const POSITION_MASK: i64 = (1 << BUCKET_BITS) - 1;

struct Bucket<T> {
    present: u16,
    values: Vec<T>, // in the order of the bits
}

impl<T> Bucket<T> {
    /// Return where the value of an offset is, or would be.
    fn index(&self, offset: i64) -> usize {
        (self.present & (bit(offset) - 1)).count_ones() as usize
    }

    fn contains(&self, offset: i64) -> bool {
        self.present & bit(offset) != 0
    }
}

fn bucket_number(offset: i64) -> i64 {
    offset >> BUCKET_BITS
}

fn bit(offset: i64) -> u16 {
    1 << (offset & POSITION_MASK)
}

pub struct OffsetMap<T> {
    buckets: BTreeMap<i64, Bucket<T>>,
    count: usize,
}

impl<T> OffsetMap<T> {
    pub fn new() -> OffsetMap<T> {
        OffsetMap {
            buckets: BTreeMap::new(),
            count: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn get(&self, offset: i64) -> Option<&T> {
        let bucket = self.buckets.get(&bucket_number(offset))?;
        bucket
            .contains(offset)
            .then(|| &bucket.values[bucket.index(offset)])
    }

    pub fn get_mut(&mut self, offset: i64) -> Option<&mut T> {
        let bucket = self.buckets.get_mut(&bucket_number(offset))?;
        let index = bucket.index(offset);
        bucket.contains(offset).then(|| &mut bucket.values[index])
    }

    /// Return offsets and values in the order of the offsets.
    pub fn iter(&self) -> impl Iterator<Item = (i64, &T)> {
        self.buckets.iter().flat_map(|(number, bucket)| {
            let mut remaining = bucket.present;
            bucket.values.iter().map(move |value| {
                let position = i64::from(remaining.trailing_zeros());
                remaining &= remaining - 1;
                ((number << BUCKET_BITS) | position, value)
            })
        })
    }

    /// Set the value of an offset, whether it has one or not.
    pub fn insert(&mut self, offset: i64, value: T) {
        let bucket = self
            .buckets
            .entry(bucket_number(offset))
            .or_insert_with(|| Bucket {
                present: 0,
                values: Vec::new(),
            });
        let index = bucket.index(offset);
        if bucket.contains(offset) {
            bucket.values[index] = value;
        } else {
            bucket.values.insert(index, value);
            bucket.present |= bit(offset);
            self.count += 1;
        }
    }

    pub fn remove(&mut self, offset: i64) -> Option<T> {
        let number = bucket_number(offset);
        let bucket = self.buckets.get_mut(&number)?;
        if !bucket.contains(offset) {
            return None;
        }
        let value = bucket.values.remove(bucket.index(offset));
        bucket.present &= !bit(offset);
        self.count -= 1;
        if bucket.values.is_empty() {
            self.buckets.remove(&number);
        } else if bucket.values.len() * 4 <= bucket.values.capacity() {
            // A half that stays open for long must not keep the memory of all its neighbours.
            bucket.values.shrink_to(bucket.values.len() * 2);
        }
        Some(value)
    }

    /// Return the first offset that is not below `begin`, and its value.
    pub fn first_from(&self, begin: i64) -> Option<(i64, &T)> {
        let first_number = bucket_number(begin);
        self.buckets
            .range(first_number..)
            .find_map(|(number, bucket)| {
                let is_cut = *number == first_number;
                let skipped = if is_cut { bit(begin) - 1 } else { 0 };
                let remaining = bucket.present & !skipped;
                (remaining != 0).then(|| {
                    let position = i64::from(remaining.trailing_zeros());
                    let offset = (number << BUCKET_BITS) | position;
                    (offset, &bucket.values[bucket.index(offset)])
                })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets in no order: dense and sparse ones, both ends of a bucket, negative ones, extremes.
    fn offsets() -> Vec<i64> {
        let mut offsets: Vec<i64> = (0..200).map(|number| number * 37 % 200).collect();
        offsets.extend([-1, -16, -17, 1_000_000, 1_000_015, 1_000_016]);
        offsets.extend([i64::MIN, i64::MAX]);
        offsets
    }

    fn assert_equal(map: &OffsetMap<i64>, model: &BTreeMap<i64, i64>) {
        assert_eq!(map.len(), model.len());
        let mut next = Some(i64::MIN);
        let mut seen = Vec::new();
        while let Some((offset, value)) = next.and_then(|begin| map.first_from(begin)) {
            seen.push((offset, *value));
            next = offset.checked_add(1);
        }
        let expected: Vec<_> = model
            .iter()
            .map(|(offset, value)| (*offset, *value))
            .collect();
        assert_eq!(seen, expected);
        let all: Vec<_> = map.iter().map(|(offset, value)| (offset, *value)).collect();
        assert_eq!(all, expected);
    }

    #[test]
    fn it_is_an_ordered_map() {
        let (mut map, mut model) = (OffsetMap::new(), BTreeMap::new());
        for offset in offsets() {
            assert_eq!(map.get(offset), None);
            map.insert(offset, offset / 2);
            model.insert(offset, offset / 2);
        }
        assert_equal(&map, &model);
        map.insert(7, 700);
        model.insert(7, 700);
        for (number, offset) in offsets().into_iter().rev().enumerate() {
            assert_eq!(map.get(offset), model.get(&offset));
            assert_eq!(map.get_mut(offset), model.get_mut(&offset));
            if number % 3 != 0 {
                assert_eq!(map.remove(offset), model.remove(&offset));
                assert_eq!(map.remove(offset), None);
            }
            if number % 20 == 0 {
                assert_equal(&map, &model);
            }
        }
        assert_equal(&map, &model);
    }

    #[test]
    fn a_value_that_stays_does_not_keep_the_memory_of_its_neighbours() {
        let mut map = OffsetMap::new();
        for offset in 0..16 {
            map.insert(offset, offset);
        }
        for offset in 0..15 {
            map.remove(offset);
        }
        assert!(map.buckets[&0].values.capacity() <= 4);
        map.remove(15);
        assert!(map.buckets.is_empty());
    }
}
