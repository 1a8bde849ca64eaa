// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/*
 * The core's API for RDMA READ and WRITE of scattered memory, and its pools of regions, as storage
 * targets use them.
 */
#include <rdma/mr_pool.h>
#include <rdma/rw.h>

#include "kernel-verbs.h"

#define PORT 1

struct context {
	struct rdma_rw_ctx rw;
	struct ib_qp *qp;
	struct scatterlist *list;
	unsigned int count;
	enum dma_data_direction direction;
	struct op op;
};

static void undo_context(void *what)
{
	struct context *context = what;

	rdma_rw_ctx_destroy(&context->rw, context->qp, PORT, context->list, context->count, context->direction);
}

/* Pages that are not mapped: the API does that. */
static struct scatterlist *unmapped(struct segments *segments)
{
	struct scatterlist *list = memory(segments->count * sizeof(*list));
	unsigned int i;

	sg_init_table(list, segments->count);
	for (i = 0; i < segments->count; i++)
		sg_set_buf(&list[i], segments->pages[i] + segments->segment[i].offset, segments->segment[i].length);
	return list;
}

/*
 * Between end a's segments and end b's region: TO_DEVICE writes there, FROM_DEVICE reads from there.
 */
static struct context *transfer(struct pair *p, struct segments *segments, struct ib_mr *mr, u32 offset,
				enum dma_data_direction direction)
{
	struct context *context = memory(sizeof(*context));
	int ret;

	op_init(&context->op, p->a.send_cq);
	context->qp = p->a.qp;
	context->list = unmapped(segments);
	context->count = segments->count;
	context->direction = direction;
	ret = rdma_rw_ctx_init(&context->rw, p->a.qp, PORT, context->list, context->count, offset, mr->iova + offset,
			       mr->rkey, direction);
	if (ret <= 0)
		fail("rdma_rw_ctx_init: %d", ret);
	/* Before the queue pair goes. */
	defer(UNDO_QP, undo_context, context);
	return context;
}

static void done(struct context *context)
{
	forget(context);
	undo_context(context);
}

static void go(struct pair *p, struct context *context)
{
	OK(rdma_rw_ctx_post(&context->rw, p->a.qp, PORT, &context->op.cqe, NULL));
	expect(&context->op, IB_WC_SUCCESS);
	done(context);
}

static void both_ways(unsigned int pages)
{
	/* Room for a work request for each page, where the core uses no regions. */
	struct pair p = PAIR(.entries = 64 + pages, .rdma_ctxs = 16, .sges = 1);
	struct segments *near = make_pages(pages), *far = make_pages(pages);
	struct ib_mr *mr = remote_region(&p, far, ALL_ACCESS);

	fill_segments(near, 1);
	go(&p, transfer(&p, near, mr, 0, DMA_TO_DEVICE));
	CHECK(filled_segments(far, 1));
	fill_segments(far, 2);
	go(&p, transfer(&p, near, mr, 0, DMA_FROM_DEVICE));
	CHECK(filled_segments(near, 2));
}

TEST(rw_one_page)
{
	both_ways(1);
}

TEST(rw_many_pages)
{
	both_ways(64);
}

TEST(rw_most_pages)
{
	both_ways(256);
}

TEST(rw_offset)
{
	struct pair p = PAIR(.entries = 64, .rdma_ctxs = 16, .sges = 1);
	struct segments *near = make_pages(4), *far = make_pages(4);
	struct ib_mr *mr = remote_region(&p, far, ALL_ACCESS);
	size_t at;

	fill_segments(near, 1);
	go(&p, transfer(&p, near, mr, 5000, DMA_TO_DEVICE));
	for (at = 0; at < near->length; at += 100)
		EQ(*byte_of(far, at), at < 5000 ? 0 : *byte_of(near, at));
}

/* Several at once, and a work request of the user's own at the end of the chain. */
TEST(rw_several_and_chained_send)
{
	struct pair p = PAIR(.entries = 64, .rdma_ctxs = 16, .sges = 1);
	struct segments *near[8], *far[8];
	struct context *contexts[8];
	struct request *sends[8];
	struct receive *receives[8];
	int i;

	for (i = 0; i < 8; i++) {
		struct ib_mr *mr;

		near[i] = make_pages(8);
		far[i] = make_pages(8);
		mr = remote_region(&p, far[i], ALL_ACCESS);
		fill_segments(near[i], i);
		contexts[i] = transfer(&p, near[i], mr, 0, DMA_TO_DEVICE);
		sends[i] = make_request(&p.a, IB_WR_SEND);
		receives[i] = receive_into(&p.b, NULL, 0);
	}
	for (i = 0; i < 8; i++)
		OK(rdma_rw_ctx_post(&contexts[i]->rw, p.a.qp, PORT, NULL, &sends[i]->wr));
	for (i = 0; i < 8; i++) {
		expect_ok(&sends[i]->op, IB_WC_SEND);
		expect_ok(&receives[i]->op, IB_WC_RECV);
		done(contexts[i]);
		CHECK(filled_segments(far[i], i));
	}
}

/* What the other side does not allow. */
TEST(rw_remote_error)
{
	struct pair p = PAIR(.entries = 64, .rdma_ctxs = 16, .sges = 1);
	struct segments *near = make_pages(4), *far = make_pages(4);
	struct ib_mr *mr = remote_region(&p, far, IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ);
	struct context *context = transfer(&p, near, mr, 0, DMA_TO_DEVICE);

	OK(rdma_rw_ctx_post(&context->rw, p.a.qp, PORT, &context->op.cqe, NULL));
	CHECK(completes(&context->op, 10000));
	CHECK(context->op.wc.status == IB_WC_REM_ACCESS_ERR || context->op.wc.status == IB_WC_WR_FLUSH_ERR);
	done(context);
	CHECK(zero_segments(far));
}

TEST(rw_mr_factor)
{
	unsigned int factor = rdma_rw_mr_factor(device, PORT, 256);

	/* By regions or, if the core uses none, by lists, a MiB takes no more than this. */
	CHECK(factor >= 1 && factor <= DIV_ROUND_UP(256, min(256, device->attrs.max_sge_rd)));
}

static void undo_pool(void *what)
{
	struct pair *p = what;

	ib_mr_pool_destroy(p->a.qp, &p->a.qp->rdma_mrs);
}

TEST(mr_pool)
{
	struct pair *p = memory(sizeof(*p));
	struct ib_mr *mrs[17];
	struct segments *segments = make_pages(4);
	int round, i;

	need_fast_registration();
	*p = PAIR();
	OK(ib_mr_pool_init(p->a.qp, &p->a.qp->rdma_mrs, 16, IB_MR_TYPE_MEM_REG, 16, 0));
	defer(UNDO_QP, undo_pool, p);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < 17; i++)
			mrs[i] = ib_mr_pool_get(p->a.qp, &p->a.qp->rdma_mrs);
		CHECK(!mrs[16]);
		for (i = 0; i < 16; i++) {
			CHECK(mrs[i]);
			registered(&p->a, mrs[i], segments, ALL_ACCESS);
			run(&p->a, make_inv(&p->a, mrs[i]->rkey), IB_WC_SUCCESS);
			ib_mr_pool_put(p->a.qp, &p->a.qp->rdma_mrs, mrs[i]);
		}
	}
}

const struct test rw_tests[] = {
	ENTRY(rw_one_page),
	ENTRY(rw_many_pages),
	ENTRY(rw_most_pages),
	ENTRY(rw_offset),
	ENTRY(rw_several_and_chained_send),
	ENTRY(rw_remote_error),
	ENTRY(rw_mr_factor),
	ENTRY(mr_pool),
	{},
};
