// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* Fast registration: regions, what is mapped into them, and binding them again and again. */
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "kernel-verbs.h"

static void undo_mr(void *what)
{
	ib_dereg_mr(what);
}

/* Regions of all sizes up to the largest. */
TEST(mr_alloc_sizes)
{
	static const u32 pages[] = { 1, 2, 3, 16, 255, 256, 257, 511, 512, 513, 4096, 65536, 1 << 20 };
	struct ib_pd *pd = make_pd(0);
	u32 largest = device->attrs.max_fast_reg_page_list_len;
	int i;

	need_fast_registration();
	for (i = 0; i < ARRAY_SIZE(pages) && pages[i] <= largest; i++) {
		struct ib_mr *mr = make_mr(pd, IB_MR_TYPE_MEM_REG, pages[i]);

		CHECK(mr->pd == pd && mr->device == device);
	}
	make_mr(pd, IB_MR_TYPE_MEM_REG, largest);
}

TEST(mr_alloc_bad)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_mr *mr;

	need_fast_registration();
	mr = ib_alloc_mr(pd, IB_MR_TYPE_MEM_REG, device->attrs.max_fast_reg_page_list_len + 1);
	if (!IS_ERR(mr)) {
		ib_dereg_mr(mr);
		fail("a region larger than the largest");
	}
	mr = ib_alloc_mr(pd, IB_MR_TYPE_USER, 16);
	if (!IS_ERR(mr)) {
		ib_dereg_mr(mr);
		fail("a region of a type that cannot be allocated");
	}
}

/* Keys of regions that there are at the same time differ in their index. */
TEST(mr_alloc_many)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_mr **mrs = memory(200 * sizeof(*mrs));
	int i, j;

	for (i = 0; i < 200; i++) {
		mrs[i] = make_mr(pd, IB_MR_TYPE_MEM_REG, 16);
		for (j = 0; j < i; j++)
			CHECK(mrs[i]->rkey >> 8 != mrs[j]->rkey >> 8);
	}
}

/* Mapping. */

TEST(map_pages)
{
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 16);
	struct segments *segments = make_pages(16);

	map(mr, segments);
	EQ(mr->length, 16 * PAGE_SIZE);
	EQ(mr->page_size, PAGE_SIZE);
	EQ(mr->iova, sg_dma_address(segments->table.sgl));
}

/* The first entry may start anywhere in its page, the last end anywhere in its. */
TEST(map_unaligned_ends)
{
	static const struct segment list[] = { { 1234, PAGE_SIZE - 1234 }, { 0, PAGE_SIZE }, { 0, 77 } };
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 3);
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));

	map(mr, segments);
	EQ(mr->length, 2 * PAGE_SIZE - 1234 + 77);
	EQ(mr->iova, sg_dma_address(segments->table.sgl));
}

/* It stops at a gap. */
TEST(map_stops_at_gap)
{
	static const struct segment list[] = { { 0, PAGE_SIZE }, { 0, 100 }, { 0, PAGE_SIZE } };
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 8);
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));

	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, NULL, PAGE_SIZE), 2);
	EQ(mr->length, PAGE_SIZE + 100);
}

/* It stops when the region is full, and says where. */
TEST(map_stops_when_full)
{
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 4);
	struct segments *segments = make_pages(10);
	static const struct segment large = { 0, 8 * PAGE_SIZE };
	unsigned int offset = 0, at;

	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, NULL, PAGE_SIZE), 4);
	EQ(mr->length, 4 * PAGE_SIZE);
	/* In the middle of an entry. */
	segments = make_segments(&large, 1);
	EQ(ib_map_mr_sg(mr, segments->table.sgl, 1, &offset, PAGE_SIZE), 0);
	/* Its length counts, and the core's own helper leaves the last page out of that. */
	CHECK(mr->length == 4 * PAGE_SIZE || mr->length == 3 * PAGE_SIZE);
	EQ(offset, mr->length);
	at = offset;
	EQ(ib_map_mr_sg(mr, segments->table.sgl, 1, &offset, PAGE_SIZE), at == 4 * PAGE_SIZE);
	EQ(mr->iova, sg_dma_address(segments->table.sgl) + at);
}

TEST(map_offset)
{
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 4);
	struct segments *segments = make_pages(4);
	unsigned int offset = 100;

	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, &offset, PAGE_SIZE), 4);
	EQ(mr->length, 4 * PAGE_SIZE - 100);
	EQ(mr->iova, sg_dma_address(segments->table.sgl) + 100);
}

TEST(map_bad_page_size)
{
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 4);
	struct segments *segments = make_pages(2);

	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, NULL, 2048), -EINVAL);
	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, NULL, 12288), -EINVAL);
}

/* Registration. */

/* A WRITE to all of a region, and a READ of it. */
static void used(struct pair *p, struct ib_mr *mr, struct segments *segments, unsigned int seed)
{
	struct buffer *buffer = make_buffer(segments->length);
	u32 length = segments->length;

	fill(buffer->data, length, seed);
	run(&p->a, make_rdma(&p->a, IB_WR_RDMA_WRITE, buffer, length, mr->iova, mr->rkey), IB_WC_SUCCESS);
	CHECK(filled_segments(segments, seed));
	fill_segments(segments, seed + 1);
	run(&p->a, make_rdma(&p->a, IB_WR_RDMA_READ, buffer, length, mr->iova, mr->rkey), IB_WC_SUCCESS);
	CHECK(filled(buffer->data, length, seed + 1));
}

TEST(reg_remote)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(16);

	used(&p, remote_region(&p, segments, ALL_ACCESS), segments, 1);
}

/* Bytes anywhere in it. */
TEST(reg_all_offsets)
{
	static const struct segment list[] = { { 100, PAGE_SIZE - 100 }, { 0, PAGE_SIZE }, { 0, 200 } };
	struct pair p = PAIR();
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);
	struct buffer *buffer = make_buffer(4096);
	size_t at;

	used(&p, mr, segments, 1);
	fill_segments(segments, 5);
	for (at = 0; at + 64 <= segments->length; at += 61) {
		struct request *read = make_rdma(&p.a, IB_WR_RDMA_READ, buffer, 64, mr->iova + at, mr->rkey);
		int i;

		run(&p.a, read, IB_WC_SUCCESS);
		for (i = 0; i < 64; i++)
			EQ(buffer->data[i], *byte_of(segments, at + i));
	}
}

/* As local key, of sends and of receives. */
TEST(reg_local)
{
	struct pair p = PAIR();
	struct segments *from = make_pages(8), *to = make_pages(8);
	struct ib_mr *source = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 8);
	struct ib_mr *sink = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 8);
	struct receive *receive = make_receive(p.b.recv_cq);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	registered(&p.a, source, from, 0);
	registered(&p.b, sink, to, IB_ACCESS_LOCAL_WRITE);
	fill_segments(from, 3);
	receive_sge(receive, sink->iova, sink->length, sink->lkey);
	post_receive(&p.b, receive);
	with_sge(request, source->iova, source->length, source->lkey);
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_SEND);
	expect_ok(&receive->op, IB_WC_RECV);
	EQ(receive->op.wc.byte_len, 8 * PAGE_SIZE);
	CHECK(filled_segments(to, 3));
}

TEST(reg_atomic)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);
	struct buffer *into = make_buffer(8);
	struct request *request = make_rdma(&p.a, IB_WR_ATOMIC_FETCH_AND_ADD, into, 8, mr->iova + PAGE_SIZE + 8, mr->rkey);

	if (device->attrs.atomic_cap == IB_ATOMIC_NONE)
		skip("the device has no atomic operations");
	request->atomic.compare_add = 3;
	run(&p.a, request, IB_WC_SUCCESS);
	EQ(*(u64 *)byte_of(segments, PAGE_SIZE + 8), 3);
}

/* Pages larger than the kernel's. */
static void large_pages(size_t page_size)
{
	/* Each starts at a multiple of the page size, as it is allocated. */
	struct segment list[] = { { 0, page_size }, { 0, page_size }, { 0, page_size - PAGE_SIZE } };
	struct pair p = PAIR();
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 3);
	struct segments *segments;
	struct buffer *buffer = make_buffer(SZ_64K);
	struct request *reg;
	size_t at;

	if (!(device->attrs.page_size_cap & page_size))
		skip("the device has no pages of %zu bytes", page_size);
	segments = make_segments(list, ARRAY_SIZE(list));
	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, NULL, page_size), segments->nents);
	EQ(mr->length, segments->length);
	EQ(mr->page_size, page_size);
	reg = make_reg(&p.b, mr, ALL_ACCESS);
	run(&p.b, reg, IB_WC_SUCCESS);
	for (at = page_size - SZ_32K; at < segments->length; at += page_size) {
		size_t length = min_t(size_t, SZ_64K, segments->length - at);
		size_t i;

		fill(buffer->data, length, at >> 12);
		run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, buffer, length, mr->iova + at, mr->rkey), IB_WC_SUCCESS);
		for (i = 0; i < length; i += 97)
			EQ(*byte_of(segments, at + i), buffer->data[i]);
	}
}

TEST(reg_pages_64k)
{
	large_pages(SZ_64K);
}

TEST(reg_pages_2m)
{
	large_pages(SZ_2M);
}

/* As many pages as the device has a list for: the same few again and again. */
TEST(reg_most_pages)
{
	u32 pages = device->attrs.max_fast_reg_page_list_len, i;
	struct pair p = PAIR();
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, pages);
	struct buffer *memory_of_pages = make_buffer(16 * PAGE_SIZE), *buffer = make_buffer(PAGE_SIZE);
	struct scatterlist *list = memory(pages * sizeof(*list));
	struct request *reg;
	u64 last;

	/* Mapped already, one by one. */
	sg_init_table(list, pages);
	for (i = 0; i < pages; i++) {
		sg_dma_address(&list[i]) = memory_of_pages->addr + (i * 7 % 16) * PAGE_SIZE;
		sg_dma_len(&list[i]) = PAGE_SIZE;
		list[i].length = PAGE_SIZE;
	}
	EQ(ib_map_mr_sg(mr, list, pages, NULL, PAGE_SIZE), pages);
	EQ(mr->length, (u64)pages * PAGE_SIZE);
	reg = make_reg(&p.b, mr, ALL_ACCESS);
	run(&p.b, reg, IB_WC_SUCCESS);
	last = (u64)(pages - 1) * PAGE_SIZE;
	fill(buffer->data, PAGE_SIZE, 9);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, buffer, PAGE_SIZE, mr->iova + last, mr->rkey), IB_WC_SUCCESS);
	CHECK(filled(memory_of_pages->data + ((pages - 1) * 7 % 16) * PAGE_SIZE, PAGE_SIZE, 9));
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, buffer, PAGE_SIZE, mr->iova + last + 1, mr->rkey),
	    IB_WC_REM_ACCESS_ERR);
}

/* Work requests count addresses from zero. */
TEST(reg_zero_based)
{
	static const struct segment list[] = { { 300, PAGE_SIZE - 300 }, { 0, PAGE_SIZE } };
	struct pair p = PAIR();
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 4);
	struct request *reg;

	EQ(ib_map_mr_sg_zbva(mr, segments->table.sgl, segments->nents, NULL, PAGE_SIZE), segments->nents);
	EQ(mr->iova, 0);
	reg = make_reg(&p.b, mr, ALL_ACCESS);
	run(&p.b, reg, IB_WC_SUCCESS);
	used(&p, mr, segments, 4);
}

/* The user of a region may call its first byte what it likes. */
TEST(reg_own_iova)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(3);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 4);
	struct request *reg;

	map(mr, segments);
	mr->iova = 0x123456789000ull;
	reg = make_reg(&p.b, mr, ALL_ACCESS);
	run(&p.b, reg, IB_WC_SUCCESS);
	used(&p, mr, segments, 4);
}

/* Without the flag there is no completion; what follows finds it done. */
TEST(reg_unsignaled_then_used)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(4);
	struct ib_mr *mr = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 4);
	struct buffer *to = make_buffer(4 * PAGE_SIZE);
	struct receive *receive = receive_into(&p.b, to, 4 * PAGE_SIZE);
	struct request *reg, *send = make_request(&p.a, IB_WR_SEND);

	fill_segments(segments, 8);
	map(mr, segments);
	reg = make_reg(&p.a, mr, IB_ACCESS_LOCAL_WRITE);
	reg->wr.send_flags = 0;
	with_sge(send, mr->iova, mr->length, mr->lkey);
	reg->wr.next = &send->wr;
	post(&p.a, reg);
	expect_ok(&send->op, IB_WC_SEND);
	expect_ok(&receive->op, IB_WC_RECV);
	CHECK(filled(to->data, 4 * PAGE_SIZE, 8));
	CHECK(!completed(&reg->op));
}

/* Bound again and again: what was there before is not reached any more. */
TEST(reg_rebind)
{
	struct pair p = PAIR();
	struct segments *segments[2] = { make_pages(8), make_pages(8) };
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 8);
	int i;

	for (i = 0; i < 300; i++) {
		registered(&p.b, mr, segments[i % 2], ALL_ACCESS);
		if (i % 50 < 2)
			used(&p, mr, segments[i % 2], i);
		run(&p.b, make_inv(&p.b, mr->rkey), IB_WC_SUCCESS);
	}
}

/*
 * The pipelined model: registrations, uses and invalidations of one region in flight at once, each
 * registration with the list that was mapped for it.
 */
TEST(reg_pipeline_one_region)
{
	enum { DEPTH = 12 };
	struct pair p = PAIR(.entries = 4 * DEPTH);
	struct ib_mr *mr = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 4);
	struct segments *from[DEPTH];
	struct receive *receives[DEPTH];
	struct request *regs[DEPTH], *sends[DEPTH], *invs[DEPTH];
	struct buffer *to[DEPTH];
	int round, i;

	for (i = 0; i < DEPTH; i++) {
		from[i] = make_pages(4);
		to[i] = make_buffer(4 * PAGE_SIZE);
	}
	for (round = 0; round < 4; round++) {
		for (i = 0; i < DEPTH; i++) {
			fill_segments(from[i], 16 * round + i);
			receives[i] = receive_into(&p.b, to[i], 4 * PAGE_SIZE);
		}
		for (i = 0; i < DEPTH; i++) {
			map(mr, from[i]);
			regs[i] = make_reg(&p.a, mr, IB_ACCESS_LOCAL_WRITE);
			sends[i] = make_request(&p.a, IB_WR_SEND);
			with_sge(sends[i], mr->iova, mr->length, mr->lkey);
			invs[i] = make_inv(&p.a, mr->rkey);
			regs[i]->wr.next = &sends[i]->wr;
			sends[i]->wr.next = &invs[i]->wr;
			post(&p.a, regs[i]);
		}
		for (i = 0; i < DEPTH; i++) {
			expect_ok(&regs[i]->op, IB_WC_REG_MR);
			expect_ok(&sends[i]->op, IB_WC_SEND);
			expect_ok(&invs[i]->op, IB_WC_LOCAL_INV);
			expect_ok(&receives[i]->op, IB_WC_RECV);
			CHECK(filled(to[i]->data, 4 * PAGE_SIZE, 16 * round + i));
		}
	}
}

/* The same with several regions in turn. */
TEST(reg_pipeline_many_regions)
{
	enum { REGIONS = 8, ROUNDS = 12 };
	struct pair p = PAIR(.entries = 4 * REGIONS);
	struct ib_mr *mrs[REGIONS];
	struct segments *from[REGIONS];
	struct buffer *to[REGIONS];
	int round, i;

	for (i = 0; i < REGIONS; i++) {
		mrs[i] = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 4);
		from[i] = make_pages(4);
		to[i] = make_buffer(4 * PAGE_SIZE);
	}
	for (round = 0; round < ROUNDS; round++) {
		struct request *regs[REGIONS], *sends[REGIONS], *invs[REGIONS];
		struct receive *receives[REGIONS];

		for (i = 0; i < REGIONS; i++) {
			fill_segments(from[i], 16 * round + i);
			receives[i] = receive_into(&p.b, to[i], 4 * PAGE_SIZE);
		}
		for (i = 0; i < REGIONS; i++) {
			map(mrs[i], from[i]);
			regs[i] = make_reg(&p.a, mrs[i], 0);
			regs[i]->wr.send_flags = 0;
			sends[i] = make_request(&p.a, IB_WR_SEND);
			with_sge(sends[i], mrs[i]->iova, mrs[i]->length, mrs[i]->lkey);
			invs[i] = make_inv(&p.a, mrs[i]->rkey);
			regs[i]->wr.next = &sends[i]->wr;
			post(&p.a, regs[i]);
		}
		for (i = 0; i < REGIONS; i++)
			post(&p.a, invs[i]);
		for (i = 0; i < REGIONS; i++) {
			expect_ok(&invs[i]->op, IB_WC_LOCAL_INV);
			expect_ok(&sends[i]->op, IB_WC_SEND);
			expect_ok(&receives[i]->op, IB_WC_RECV);
			CHECK(filled(to[i]->data, 4 * PAGE_SIZE, 16 * round + i));
		}
	}
}

/* A region that is registered cannot be registered again before it is invalidated. */
TEST(reg_while_valid)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 4);

	registered(&p.b, mr, segments, ALL_ACCESS);
	map(mr, segments);
	run(&p.b, make_reg(&p.b, mr, ALL_ACCESS), IB_WC_MW_BIND_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

TEST(reg_of_other_pd)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(make_pd(0), IB_MR_TYPE_MEM_REG, 4);

	map(mr, segments);
	run(&p.b, make_reg(&p.b, mr, ALL_ACCESS), IB_WC_MW_BIND_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

/* Writing from afar needs writing from nearby. */
TEST(reg_bad_access)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 4);

	map(mr, segments);
	run(&p.b, make_reg(&p.b, mr, IB_ACCESS_REMOTE_WRITE), IB_WC_MW_BIND_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

TEST(reg_flushed)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 4);
	struct request *inv;

	to_state(&p.b, IB_QPS_ERR);
	map(mr, segments);
	run(&p.b, make_reg(&p.b, mr, ALL_ACCESS), IB_WC_WR_FLUSH_ERR);
	inv = make_inv(&p.b, mr->rkey);
	run(&p.b, inv, IB_WC_WR_FLUSH_ERR);
}

/*
 * A region outlives the queue pair that it was registered through, and is invalidated and used
 * through another.
 */
TEST(reg_outlives_queue_pair)
{
	struct pair p = PAIR(), q;
	struct segments *segments = make_pages(4);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);
	struct options options = { .srq_pd = p.b.pd };

	destroy_qp(&p.a);
	destroy_qp(&p.b);
	q = connected(&options);
	used(&q, mr, segments, 2);
	run(&q.b, make_inv(&q.b, mr->rkey), IB_WC_SUCCESS);
	registered(&q.b, mr, segments, ALL_ACCESS);
	used(&q, mr, segments, 3);
}

/* Deregistered while it is valid: nobody reaches it. */
TEST(dereg_valid)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct buffer *from = make_buffer(64);
	struct ib_mr *mr = ib_alloc_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 4);
	u64 addr;
	u32 key;

	need_fast_registration();
	CHECK(!IS_ERR(mr));
	defer(UNDO_LAST, undo_mr, mr);
	registered(&p.b, mr, segments, ALL_ACCESS);
	addr = mr->iova;
	key = mr->rkey;
	forget(mr);
	OK(ib_dereg_mr(mr));
	fill(from->data, 64, 1);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 64, addr, key), IB_WC_REM_ACCESS_ERR);
	CHECK(zero_segments(segments));
}

/* Regions whose segments start and end anywhere. */

static struct ib_mr *with_gaps(struct pair *p, struct segments *segments, int access)
{
	struct ib_mr *mr;

	need_sg_gaps();
	mr = make_mr(p->b.pd, IB_MR_TYPE_SG_GAPS, segments->count);
	registered(&p->b, mr, segments, access);
	return mr;
}

TEST(gaps_any_segments)
{
	static const struct segment list[] = {
		{ 17, 1 }, { 4000, 200 }, { 0, PAGE_SIZE }, { 1, 4095 }, { 2048, 3 }, { 0, 3 * PAGE_SIZE }, { 9, 12345 },
	};
	struct pair p = PAIR();
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));

	used(&p, with_gaps(&p, segments, ALL_ACCESS), segments, 1);
}

/* Nothing between the segments is touched. */
TEST(gaps_are_left_alone)
{
	static const struct segment list[] = { { 10, 20 }, { 30, 40 }, { 50, 60 } };
	struct pair p = PAIR();
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));
	struct ib_mr *mr = with_gaps(&p, segments, ALL_ACCESS);
	struct buffer *from = make_buffer(120);
	int i;

	memset(from->data, 0xff, 120);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 120, mr->iova, mr->rkey), IB_WC_SUCCESS);
	for (i = 0; i < 3; i++) {
		const struct segment *segment = &list[i];

		CHECK(all_zero(segments->pages[i], segment->offset));
		CHECK(!memchr_inv(segments->pages[i] + segment->offset, 0xff, segment->length));
		CHECK(all_zero(segments->pages[i] + segment->offset + segment->length, PAGE_SIZE - segment->offset - segment->length));
	}
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 120, mr->iova + 1, mr->rkey), IB_WC_REM_ACCESS_ERR);
}

/* More segments than one table has room for. */
TEST(gaps_many_segments)
{
	enum { COUNT = 1000 };
	struct segment *list = memory(COUNT * sizeof(*list));
	struct pair p = PAIR();
	struct segments *segments;
	int i;

	for (i = 0; i < COUNT; i++)
		list[i] = (struct segment){ .offset = i * 37 % 2000, .length = 1 + i * 13 % 999 };
	segments = make_segments(list, COUNT);
	used(&p, with_gaps(&p, segments, ALL_ACCESS), segments, 6);
}

TEST(gaps_offset)
{
	static const struct segment list[] = { { 100, 1000 }, { 7, 500 } };
	struct pair p = PAIR();
	struct segments *segments = make_segments(list, ARRAY_SIZE(list));
	struct buffer *buffer = make_buffer(2000);
	unsigned int offset = 250;
	struct ib_mr *mr;

	need_sg_gaps();
	mr = make_mr(p.b.pd, IB_MR_TYPE_SG_GAPS, 2);
	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, &offset, PAGE_SIZE), segments->nents);
	EQ(mr->length, 1250);
	run(&p.b, make_reg(&p.b, mr, ALL_ACCESS), IB_WC_SUCCESS);
	fill_segments(segments, 2);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_READ, buffer, 1250, mr->iova, mr->rkey), IB_WC_SUCCESS);
	EQ(buffer->data[0], *byte_of(segments, 250));
	EQ(buffer->data[1249], *byte_of(segments, 1499));
}

TEST(gaps_rebind)
{
	struct pair p = PAIR();
	struct ib_mr *mr;
	int i;

	need_sg_gaps();
	mr = make_mr(p.b.pd, IB_MR_TYPE_SG_GAPS, 8);
	for (i = 1; i < 40; i++) {
		struct segment list[3] = { { i, i * 10 }, { 3 * i, 5 }, { 4000 - i, 96 + i } };
		struct segments *segments = make_segments(list, ARRAY_SIZE(list));

		registered(&p.b, mr, segments, ALL_ACCESS);
		used(&p, mr, segments, i);
		run(&p.b, make_inv(&p.b, mr->rkey), IB_WC_SUCCESS);
	}
}

const struct test mr_tests[] = {
	ENTRY(mr_alloc_sizes),
	ENTRY(mr_alloc_bad),
	ENTRY(mr_alloc_many),
	ENTRY(map_pages),
	ENTRY(map_unaligned_ends),
	ENTRY(map_stops_at_gap),
	ENTRY(map_stops_when_full),
	ENTRY(map_offset),
	ENTRY(map_bad_page_size),
	ENTRY(reg_remote),
	ENTRY(reg_all_offsets),
	ENTRY(reg_local),
	ENTRY(reg_atomic),
	ENTRY(reg_pages_64k),
	ENTRY(reg_pages_2m),
	ENTRY(reg_most_pages),
	ENTRY(reg_zero_based),
	ENTRY(reg_own_iova),
	ENTRY(reg_unsignaled_then_used),
	ENTRY(reg_rebind),
	ENTRY(reg_pipeline_one_region),
	ENTRY(reg_pipeline_many_regions),
	ENTRY(reg_while_valid),
	ENTRY(reg_of_other_pd),
	ENTRY(reg_bad_access),
	ENTRY(reg_flushed),
	ENTRY(reg_outlives_queue_pair),
	ENTRY(dereg_valid),
	ENTRY(gaps_any_segments),
	ENTRY(gaps_are_left_alone),
	ENTRY(gaps_many_segments),
	ENTRY(gaps_offset),
	ENTRY(gaps_rebind),
	{},
};
